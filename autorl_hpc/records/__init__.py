"""What lies on disk, as typed models with a schema_version. JSON Schemas of them are in docs/schemas/."""
