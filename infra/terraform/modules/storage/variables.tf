variable "bucket_name" {
  description = "Of the bucket that holds everything of an installation; unique in all of AWS."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket_name))
    error_message = "Give 3 to 63 small letters, digits and hyphens; dots break TLS."
  }
}

variable "kms_key_arn" {
  description = "Encrypts all objects (SSE-KMS with bucket keys). null: S3's own keys (SSE-S3), which cost nothing."
  type        = string
  default     = null
}

variable "noncurrent_days" {
  description = "For how many days overwritten and deleted objects can still be had. Checkpoints of finished jobs are deleted, so they cost storage for so long."
  type        = number
  default     = 7

  validation {
    condition     = var.noncurrent_days >= 1
    error_message = "Give at least 1."
  }
}

variable "incoming_expire_days" {
  description = "Removes what was dropped below incoming/ so many days after they came. Longer than the longest job may wait and be retried. null: they stay."
  type        = number
  default     = null
}

variable "force_destroy" {
  description = "Whether terraform destroy may delete the bucket with all that is in it. With false it refuses while anything is there."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Of everything here."
  type        = map(string)
  default     = {}
}
