variable "name" {
  description = "Name of the installation. Every resource's name begins with it."
  type        = string
}

variable "vpc_id" {
  description = "The VPC of the services."
  type        = string
}

variable "vpc_cidr" {
  description = "The VPC's address range, in which Redis and Kafka are reached."
  type        = string
}

variable "subnet_ids" {
  description = "Private subnets for the services."
  type        = list(string)
}

variable "image" {
  description = "The image of the control side, by its digest (NAME@sha256:…), so that the tested image runs. infra/images builds it."
  type        = string

  validation {
    condition     = !endswith(var.image, ":latest") && can(regex("[:@]", var.image))
    error_message = "Name a tag or a digest, and not latest: a restart must not bring other code."
  }
}

variable "architecture" {
  description = "CPU architecture of the image."
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

variable "prefixes" {
  description = "Prefixes for dropped files, each with its slash."
  type        = set(string)
  default     = ["incoming/"]
}

variable "environment" {
  description = "TOKENMILL_ variables of all services: the other modules' outputs named environment, and more settings."
  type        = map(string)
}

variable "secrets" {
  description = "Environment variables with secret values: name -> ARN of the secret."
  type        = map(string)
}

variable "kms_key_arns" {
  description = "Keys that objects, secrets and the logs are encrypted with, if they are the account's own."
  type        = list(string)
  default     = []
}

variable "intake_policy" {
  description = "IAM policy of the intake for its ingest sources: the output intake_policy of the module events."
  type        = string
}

variable "readable_buckets" {
  description = "ARNs of other buckets that jobs by reference may read, as far as TOKENMILL_KAFKA__URI_PREFIXES and similar settings allow it."
  type        = list(string)
  default     = []
}

variable "intake" {
  description = "Creates jobs from the ingest sources. cpu in 1/1024 vCPU, memory in MiB, in a combination that Fargate offers. spot: on Fargate's spot capacity, which is safe here."
  type = object({
    count  = optional(number, 1)
    cpu    = optional(number, 512)
    memory = optional(number, 1024)
    spot   = optional(bool, false)
  })
  default = {}
}

variable "dispatcher" {
  description = "Plans jobs and dispatches shards. Of several, one leads; another takes over within seconds. disk_gib: room for the plan in progress."
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
  description = "HTTP for OpenAI's clients, behind a balancer. disk_gib: room for uploads in progress, max_upload_bytes times the number of concurrent uploads. null: none."
  type = object({
    count                   = optional(number, 2)
    cpu                     = optional(number, 1024)
    memory                  = optional(number, 2048)
    spot                    = optional(bool, false)
    disk_gib                = optional(number, 40)
    certificate_arn         = string
    balancer_subnets        = list(string)
    internal                = optional(bool, true)
    allowed_cidrs           = list(string)
    request_timeout_seconds = optional(number, 600)
    drain_seconds           = optional(number, 25)
    access_log_bucket       = optional(string)
    delete_protection       = optional(bool, true)
  })
  default = null

  validation {
    condition     = try(var.gateway.drain_seconds, 0) <= 85
    error_message = "drain_seconds must be 85 at most: Fargate kills a task after 120 s, and a gateway needs some seconds more than drain_seconds."
  }

  validation {
    condition     = try(var.gateway.request_timeout_seconds, 600) >= 10 && try(var.gateway.request_timeout_seconds, 600) <= 3900
    error_message = "request_timeout_seconds must be 10 to 3,900: a balancer waits for 4,000 s at most."
  }

  validation {
    condition     = length(try(var.gateway.balancer_subnets, ["a", "b"])) >= 2
    error_message = "A balancer needs subnets in two zones."
  }
}

variable "metric_namespace" {
  description = "CloudWatch namespace to which the dispatcher reports the backlog of each model and the desired workers of each fleet; these scale the fleets."
  type        = string
  default     = "tokenmill"
}

variable "fleets" {
  description = "Fleets of workers, by name: their models, role and scaling as in the module workers. The dispatcher computes their desired workers."
  type = map(object({
    models = list(string)
    role   = optional(string, "both")
    scaling = object({
      min                = optional(number, 0)
      max                = number
      target_seconds     = optional(number, 3600)
      cold_start_seconds = optional(number, 300)
    })
  }))
  default = {}

  validation {
    condition = alltrue([
      for roles in values({ for pair in flatten([for fleet in values(var.fleets) : [for model in fleet.models : { model = split("=", model)[0], role = fleet.role }]]) : pair.model => pair.role... }) :
      length(roles) == 1 ? roles[0] == "both" : sort(roles) == tolist(["decode", "prefill"])
    ])
    error_message = "Each model has one fleet of the role both, or one of the role prefill and one of the role decode."
  }
}

variable "log_retention_days" {
  description = "Retention of logs in days."
  type        = number
  default     = 30
}

variable "container_insights" {
  description = "Whether CloudWatch records CPU and memory of each task, at a price per metric."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Tags of all resources of this module."
  type        = map(string)
  default     = {}
}
