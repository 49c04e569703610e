"""Real servers: Ceph's S3 gateway, and WebDAV by rclone, both from Debian's packages."""
