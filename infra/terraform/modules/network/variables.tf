variable "name" {
  description = "Name of the installation. Every resource's name begins with it."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,23}$", var.name))
    error_message = "Give 2 to 24 small letters, digits and hyphens, beginning with a letter."
  }
}

variable "cidr" {
  description = "Address range of the VPC. Each subnet takes a sixteenth of it."
  type        = string
  default     = "10.64.0.0/16"

  validation {
    condition     = can(cidrhost(var.cidr, 0)) && try(tonumber(split("/", var.cidr)[1]), 99) <= 20
    error_message = "Give a block of /20 or larger, such as 10.64.0.0/16."
  }
}

variable "availability_zones" {
  description = "Zones with a private subnet each. More zones have more spot capacity; ElastiCache with a replica and MSK need two."
  type        = list(string)

  validation {
    condition     = length(var.availability_zones) >= 1 && length(var.availability_zones) <= 6 && length(distinct(var.availability_zones)) == length(var.availability_zones)
    error_message = "Give one to six different zones."
  }
}

variable "nat" {
  description = "NAT to the internet: none, single (one gateway for all zones) or per_zone. With none, each AWS service in use needs an endpoint here."
  type        = string
  default     = "none"

  validation {
    condition     = contains(["none", "single", "per_zone"], var.nat)
    error_message = "Give none, single or per_zone."
  }
}

variable "public_subnets" {
  description = "Whether there are public subnets even without NAT, for a balancer that is reachable from the internet."
  type        = bool
  default     = false
}

variable "interface_endpoints" {
  description = "AWS services with an interface endpoint, by the last part of the endpoint's name, such as sqs or ecr.dkr. S3 always has its gateway endpoint, which costs nothing."
  type        = set(string)
  default     = []
}

variable "endpoint_zones" {
  description = "Number of zones with interface endpoints. Each endpoint costs by the hour in each zone."
  type        = number
  default     = 2

  validation {
    condition     = var.endpoint_zones >= 1
    error_message = "Give at least 1."
  }
}

variable "reachable_buckets" {
  description = "ARNs of the only buckets that are reachable through the endpoint, besides AWS's own for images and packages. null: any bucket."
  type        = list(string)
  default     = null
}

variable "kv_transfer_port" {
  description = "Port on which prefill workers serve KV blocks to decode workers. Only members of the output kv_transfer's security group reach it, at each other. null: no worker has a role."
  type        = number
  default     = null

  validation {
    condition     = var.kv_transfer_port == null || try(var.kv_transfer_port >= 1024 && var.kv_transfer_port < 32768 && floor(var.kv_transfer_port) == var.kv_transfer_port, false)
    error_message = "Give a port from 1024 to 32767: lower ones are reserved, and higher ones may be in use by outgoing connections."
  }
}

variable "flow_logs" {
  description = "Whether rejected connections are logged."
  type        = bool
  default     = false
}

variable "log_retention_days" {
  description = "Retention of flow logs in days."
  type        = number
  default     = 30
}

variable "kms_key_arn" {
  description = "Key that encrypts flow logs. null: AWS's own key."
  type        = string
  default     = null
}

variable "tags" {
  description = "Tags of all resources of this module."
  type        = map(string)
  default     = {}
}
