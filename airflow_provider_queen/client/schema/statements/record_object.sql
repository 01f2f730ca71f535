INSERT INTO queen.schema_objects (name, checksum) VALUES ({name}, {checksum});
