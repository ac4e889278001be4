"""The object store on S3, and queues of SQS."""
