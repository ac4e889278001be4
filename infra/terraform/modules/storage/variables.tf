variable "bucket_name" {
  description = "Name of the installation's bucket, unique in all of AWS."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket_name))
    error_message = "Give 3 to 63 small letters, digits and hyphens; dots break TLS."
  }
}

variable "kms_key_arn" {
  description = "Key that encrypts all objects (SSE-KMS with bucket keys). null: S3's own keys (SSE-S3), which cost nothing."
  type        = string
  default     = null
}

variable "noncurrent_days" {
  description = "Days for which overwritten and deleted objects are kept. These include the checkpoints of finished jobs, which cost storage until then."
  type        = number
  default     = 7

  validation {
    condition     = var.noncurrent_days >= 1
    error_message = "Give at least 1."
  }
}

variable "incoming_expire_days" {
  description = "Days after which files dropped below incoming/ are deleted. Choose more than the longest job may wait and be retried. null: never."
  type        = number
  default     = null
}

variable "force_destroy" {
  description = "Whether terraform destroy may delete the bucket with all that is in it. false: it refuses while the bucket holds objects."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Tags of all resources of this module."
  type        = map(string)
  default     = {}
}
