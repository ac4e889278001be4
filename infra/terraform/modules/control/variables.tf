variable "name" {
  description = "Of the installation; every resource's name begins with it."
  type        = string
}

variable "vpc_id" {
  description = "Where the services run."
  type        = string
}

variable "vpc_cidr" {
  description = "The VPC's addresses: Redis and Kafka are reached there."
  type        = string
}

variable "subnet_ids" {
  description = "Private subnets for the services."
  type        = list(string)
}

variable "image" {
  description = "The image of the control side, by its digest (NAME@sha256:…) so that what runs is what was tried; infra/images builds it."
  type        = string

  validation {
    condition     = !endswith(var.image, ":latest") && can(regex("[:@]", var.image))
    error_message = "Name a tag or a digest, and not latest: a restart must not bring other code."
  }
}

variable "architecture" {
  description = "That the image is built for."
  type        = string
  default     = "X86_64"

  validation {
    condition     = contains(["X86_64", "ARM64"], var.architecture)
    error_message = "Give X86_64 or ARM64."
  }
}

variable "bucket_arn" {
  description = "The installation's bucket."
  type        = string
}

variable "places" {
  description = "Where files are dropped: prefixes with their slash."
  type        = set(string)
  default     = ["incoming/"]
}

variable "environment" {
  description = "TOKENMILL_ variables of all services: what the other modules say of themselves, and your own settings."
  type        = map(string)
}

variable "secrets" {
  description = "Variables whose values are secrets: name -> ARN of the secret."
  type        = map(string)
}

variable "kms_key_arns" {
  description = "Keys that objects, secrets and the logs are encrypted with, if they are the account's own."
  type        = list(string)
  default     = []
}

variable "intake_policy" {
  description = "What an intake may do with its sources, as the module events says."
  type        = string
}

variable "readable_buckets" {
  description = "ARNs of other buckets that jobs by reference may name, as far as TOKENMILL_KAFKA__URI_PREFIXES and its like allow it."
  type        = list(string)
  default     = []
}

variable "intake" {
  description = "Makes jobs of what comes in. cpu in 1/1024 of a processor, memory in MiB, as Fargate combines them; spot: on Fargate's spot capacity, which is safe here."
  type = object({
    count  = optional(number, 1)
    cpu    = optional(number, 512)
    memory = optional(number, 1024)
    spot   = optional(bool, false)
  })
  default = {}
}

variable "dispatcher" {
  description = "Plans jobs and hands out shards. Of several one works; another takes over after seconds. disk_gib holds the plan that is being made."
  type = object({
    count    = optional(number, 1)
    cpu      = optional(number, 1024)
    memory   = optional(number, 2048)
    spot     = optional(bool, false)
    disk_gib = optional(number, 30)
  })
  default = {}
}

variable "gateway" {
  description = "HTTP for OpenAI's clients, behind a balancer. disk_gib holds uploads that are under way: max_upload_bytes times uploads at once. null: none."
  type = object({
    count             = optional(number, 2)
    cpu               = optional(number, 1024)
    memory            = optional(number, 2048)
    spot              = optional(bool, false)
    disk_gib          = optional(number, 40)
    certificate_arn   = string
    balancer_subnets  = list(string)
    internal          = optional(bool, true)
    allowed_cidrs     = list(string)
    request_timeout_seconds   = optional(number, 600)
    drain_seconds     = optional(number, 25)
    access_log_bucket = optional(string)
    delete_protection = optional(bool, true)
  })
  default = null

  validation {
    condition     = try(var.gateway.drain_seconds, 0) <= 85
    error_message = "Fargate kills after 120 s at most, and a gateway needs some seconds more than drain_seconds: give 85 at most."
  }

  validation {
    condition     = try(var.gateway.request_timeout_seconds, 600) >= 10 && try(var.gateway.request_timeout_seconds, 600) <= 3900
    error_message = "A balancer waits for 4,000 s at most: give request_timeout_seconds from 10 to 3,900."
  }

  validation {
    condition     = length(try(var.gateway.balancer_subnets, ["a", "b"])) >= 2
    error_message = "A balancer needs subnets in two zones."
  }
}

variable "metric_namespace" {
  description = "Of CloudWatch, where a dispatcher tells the backlog of each model and how many workers it wishes for; fleets are scaled by that."
  type        = string
  default     = "tokenmill"
}

variable "fleets" {
  description = "Fleets of workers, by their names: the models that they serve, and their scaling as in the module workers. The dispatcher wishes for their workers."
  type = map(object({
    models = list(string)
    scaling = object({
      min                = optional(number, 0)
      max                = number
      target_seconds     = optional(number, 3600)
      cold_start_seconds = optional(number, 300)
    })
  }))
  default = {}
}

variable "log_retention_days" {
  description = "For how long logs are kept."
  type        = number
  default     = 30
}

variable "container_insights" {
  description = "Whether CloudWatch counts processor and memory of each task, for a price by the metric."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Of everything here."
  type        = map(string)
  default     = {}
}
