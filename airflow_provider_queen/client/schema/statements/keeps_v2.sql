-- Whether v2's tables are kept beside the present ones, until somebody drops them.
SELECT to_regclass('queen_v2.verification') IS NOT NULL;
