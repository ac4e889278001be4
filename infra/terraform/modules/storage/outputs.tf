output "bucket" {
  description = "The bucket's name."
  value       = aws_s3_bucket.this.id
}

output "bucket_arn" {
  description = "The bucket's ARN."
  value       = aws_s3_bucket.this.arn
}

output "environment" {
  description = "Environment variables of processes that use the bucket."
  value       = { TOKENMILL_ROOT = "s3://${aws_s3_bucket.this.id}" }
}
