"""Object storage (S3, GCS, Azure): what a store in a bucket needs of it, behind one protocol."""
