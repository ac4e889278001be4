variable "name" {
  description = "Name of the installation. Every resource's name begins with it."
  type        = string

  validation {
    condition     = length(var.name) <= 33
    error_message = "Give at most 33 characters: ElastiCache allows 40, and this module needs 7 of them."
  }
}

variable "vpc_id" {
  description = "The VPC of the cache."
  type        = string
}

variable "subnet_ids" {
  description = "Private subnets; with replicas, in several zones."
  type        = list(string)
}

variable "client_cidrs" {
  description = "Address ranges of the clients: the VPC's."
  type        = list(string)
}

variable "node_type" {
  description = "Type of each node. The cache holds no durable data: names of shards, heartbeats, tokens of streams in progress, cached answers."
  type        = string
  default     = "cache.t4g.micro"
}

variable "engine_version" {
  description = "Version of Valkey."
  type        = string
  default     = "8.0"
}

variable "replicas" {
  description = "Replicas beside the primary. With one or more it fails over automatically to another zone. Without, a lost node delays work for minutes, but loses none."
  type        = number
  default     = 0
}

variable "kms_key_arn" {
  description = "Key that encrypts disks and the secret. null: AWS's own keys."
  type        = string
  default     = null
}

variable "secret_recovery_days" {
  description = "Days for which a deleted secret can be restored; 0 frees its name at once."
  type        = number
  default     = 7

  validation {
    condition     = var.secret_recovery_days == 0 || (var.secret_recovery_days >= 7 && var.secret_recovery_days <= 30)
    error_message = "Give 0, or 7 to 30."
  }
}

variable "tags" {
  description = "Tags of all resources of this module."
  type        = map(string)
  default     = {}
}
