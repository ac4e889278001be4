variable "name" {
  description = "Of the installation; every resource's name begins with it."
  type        = string

  validation {
    condition     = length(var.name) <= 33
    error_message = "ElastiCache takes 40 letters, of which 7 are ours."
  }
}

variable "vpc_id" {
  description = "Where the cache stands."
  type        = string
}

variable "subnet_ids" {
  description = "Private subnets; of several zones where there are replicas."
  type        = list(string)
}

variable "client_cidrs" {
  description = "Addresses from which it can be reached: the VPC's."
  type        = list(string)
}

variable "node_type" {
  description = "Of each node. What is kept is hints: names of shards, heartbeats, the tokens of streams under way, kept answers."
  type        = string
  default     = "cache.t4g.micro"
}

variable "engine_version" {
  description = "Of Valkey."
  type        = string
  default     = "8.0"
}

variable "replicas" {
  description = "Beside the primary; with one or more it fails over by itself, in another zone. Without, a lost node costs minutes of waiting, and no work."
  type        = number
  default     = 0
}

variable "kms_key_arn" {
  description = "Encrypts disks and the secret. null: with keys of AWS's."
  type        = string
  default     = null
}

variable "secret_recovery_days" {
  description = "For how long a deleted secret can be restored; 0: not at all, so that its name is free at once."
  type        = number
  default     = 7

  validation {
    condition     = var.secret_recovery_days == 0 || (var.secret_recovery_days >= 7 && var.secret_recovery_days <= 30)
    error_message = "Give 0, or 7 to 30."
  }
}

variable "tags" {
  description = "Of everything here."
  type        = map(string)
  default     = {}
}
