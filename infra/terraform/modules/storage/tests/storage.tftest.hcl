mock_provider "aws" {
  source = "../../mocks"
}

variables {
  bucket_name = "answers"
}

run "closed_and_kept" {
  assert {
    condition     = aws_s3_bucket_public_access_block.this.restrict_public_buckets && aws_s3_bucket_public_access_block.this.block_public_policy
    error_message = "the bucket can be made public"
  }

  assert {
    condition     = aws_s3_bucket_versioning.this.versioning_configuration[0].status == "Enabled"
    error_message = "overwriting a file changes its job"
  }

  assert {
    condition     = !aws_s3_bucket.this.force_destroy
    error_message = "terraform destroy deletes results"
  }

  assert {
    condition     = output.environment.TOKENMILL_ROOT == "s3://${aws_s3_bucket.this.id}"
    error_message = "the output environment lacks TOKENMILL_ROOT"
  }
}

run "dots_break_tls" {
  command = plan

  variables {
    bucket_name = "answers.example.com"
  }

  expect_failures = [var.bucket_name]
}
