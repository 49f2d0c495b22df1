"""Bytes from elsewhere: local files, S3, the disk cache, copies of manifests, push and pull."""
