-- What was dropped stays dropped: the way back to v2 makes its tables from the present ones.
SELECT 1;
