variable "name" {
  description = "Of the installation; every resource's name begins with it."
  type        = string
}

variable "fleet" {
  description = "Of these workers among the installation's: one fleet for each set of models."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,15}$", var.fleet))
    error_message = "Give 1 to 16 small letters, digits and hyphens, beginning with a letter."
  }
}

variable "vpc_id" {
  description = "Where they run."
  type        = string
}

variable "vpc_cidr" {
  description = "The VPC's addresses: Redis is reached there."
  type        = string
}

variable "subnet_ids" {
  description = "Private subnets. The more zones, the more spot capacity."
  type        = list(string)
}

variable "image" {
  description = "The image of workers, by its digest (NAME@sha256:…); infra/images builds it."
  type        = string

  validation {
    condition     = !endswith(var.image, ":latest") && can(regex("[:@]", var.image))
    error_message = "Name a tag or a digest, and not latest: a new instance must not bring other code."
  }
}

variable "models" {
  description = "What is served, each as NAME=MODEL: MODEL is s3://BUCKET/PREFIX, a hub name (needs NAT), or a path in the image. NAME is what requests call it. With several, one is loaded at a time."
  type        = list(string)

  validation {
    condition     = length(var.models) > 0 && alltrue([for model in var.models : can(regex("^[^=]+=.+$", model))])
    error_message = "Give at least one, each as NAME=MODEL."
  }
}

variable "model_arns" {
  description = "ARNs of the objects that models are read from, such as arn:aws:s3:::weights/llama/*."
  type        = list(string)
  default     = []
}

variable "options" {
  description = "More options of `tokenmill worker`, such as [\"--quantize\", \"fp8\"]."
  type        = list(string)
  default     = []
}

variable "bucket_arn" {
  description = "The installation's bucket."
  type        = string
}

variable "environment" {
  description = "TOKENMILL_ variables: what the other modules say of themselves, and your own settings."
  type        = map(string)
}

variable "secrets" {
  description = "Variables whose values are secrets: name -> ARN of the secret."
  type        = map(string)
}

variable "kms_key_arns" {
  description = "Keys that objects, secrets and the log are encrypted with, if they are the account's own. The first encrypts the log."
  type        = list(string)
  default     = []
}

variable "pools" {
  description = "Kinds of machines. purchase: on_demand or spot. instance_types: all with at least gpus_per_worker GPUs, which all can hold the models. Workers are spread by weight, after base many are on the one pool that has a base. max_instances bounds the bill."
  type = map(object({
    purchase       = string
    instance_types = list(string)
    max_instances  = number
    weight         = optional(number, 1)
    base           = optional(number, 0)
  }))

  validation {
    condition     = length(var.pools) > 0 && alltrue([for pool in values(var.pools) : contains(["on_demand", "spot"], pool.purchase)])
    error_message = "Give at least one pool; purchase is on_demand or spot."
  }

  validation {
    condition     = length([for pool in values(var.pools) : pool if pool.base > 0]) <= 1
    error_message = "ECS takes a base for one pool only."
  }

  validation {
    condition     = alltrue([for pool in values(var.pools) : pool.max_instances >= 1 && length(pool.instance_types) >= 1])
    error_message = "Each pool has an instance type and at least one instance at most."
  }

  validation {
    condition     = sum([for pool in values(var.pools) : pool.weight]) > 0
    error_message = "ECS needs one pool at least with a weight above 0."
  }
}

variable "gpus_per_worker" {
  description = "Of each worker. An instance with more GPUs runs several workers."
  type        = number
  default     = 1
}

variable "memory_mib" {
  description = "Memory that is kept for each worker when it is placed; it may use more."
  type        = number
  default     = 8192
}

variable "scaling" {
  description = "How many workers there are. min 0: none when nothing is left to do; 1 or more where callers wait for answers. target_seconds: in which work without a deadline should be done. cold_start_seconds: from the wish for a worker until it computes. idle_minutes: without any wish for a worker until all but min are let go. The module control takes this, too: its dispatcher is who wishes."
  type = object({
    min                = optional(number, 0)
    max                = number
    target_seconds     = optional(number, 3600)
    cold_start_seconds = optional(number, 300)
    idle_minutes       = optional(number, 15)
  })

  validation {
    condition     = var.scaling.min >= 0 && var.scaling.max >= max(1, var.scaling.min)
    error_message = "max is at least 1 and min; min is at least 0."
  }

  validation {
    condition     = var.scaling.target_seconds >= 60 && var.scaling.idle_minutes >= 5 && var.scaling.idle_minutes <= 60
    error_message = "target_seconds is 60 or more, idle_minutes 5 to 60."
  }
}

variable "metric_namespace" {
  description = "Where the dispatcher tells the backlog."
  type        = string
  default     = "tokenmill"
}

variable "checkpoint_seconds" {
  description = "What a killed worker costs at most. Each checkpoint is a write to S3 for each open shard."
  type        = number
  default     = 15
}

variable "lane_drain_seconds" {
  description = "That requests whose callers wait have to end when their worker is stopped; the others go on elsewhere."
  type        = number
  default     = 20

  validation {
    condition     = var.lane_drain_seconds <= 60
    error_message = "A spot instance is gone after two minutes: give 60 at most."
  }
}

variable "deployment" {
  description = "Percent of the workers that a new version may leave running at least, and at most beside the old ones. 0 and 100 where there is no room for one more; then work stands still for as long as a model loads."
  type = object({
    minimum_healthy = optional(number, 50)
    maximum         = optional(number, 200)
  })
  default = {}
}

variable "ami_id" {
  description = "Of the instances. null: Amazon's newest ECS-optimized Amazon Linux 2023 for GPUs, as it is when you apply."
  type        = string
  default     = null
}

variable "root_volume_gib" {
  description = "For the system and the image. Weights lie on the instance's own NVMe disks; where it has none, here."
  type        = number
  default     = 100
}

variable "max_instance_days" {
  description = "After so many days an instance is replaced, so that each gets its security updates."
  type        = number
  default     = 30

  validation {
    condition     = var.max_instance_days >= 1 && var.max_instance_days <= 365
    error_message = "Give 1 to 365."
  }
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
  description = "Of everything here, instances and disks included."
  type        = map(string)
  default     = {}
}
