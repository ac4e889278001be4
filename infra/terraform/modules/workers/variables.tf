variable "name" {
  description = "Name of the installation. Every resource's name begins with it."
  type        = string
}

variable "fleet" {
  description = "Name of this fleet; an installation has one fleet for each set of models."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,15}$", var.fleet))
    error_message = "Give 1 to 16 small letters, digits and hyphens, beginning with a letter."
  }
}

variable "vpc_id" {
  description = "The VPC of the workers."
  type        = string
}

variable "vpc_cidr" {
  description = "The VPC's address range, in which Redis is reached."
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

variable "engine" {
  description = "The engine of all workers of the fleet: auto, tokenmill or transformers in image, vllm in vllm_image."
  type        = string
  default     = "auto"

  validation {
    condition     = contains(["auto", "tokenmill", "vllm", "transformers"], var.engine)
    error_message = "engine is auto, tokenmill, vllm or transformers."
  }
}

variable "vllm_image" {
  description = "The image of workers whose engine is vllm, by its digest; infra/images builds it. Used instead of image."
  type        = string
  default     = null

  validation {
    condition     = var.engine != "vllm" || var.vllm_image != null
    error_message = "The engine vllm needs vllm_image: the image of workers does not contain vLLM."
  }

  validation {
    condition     = var.vllm_image == null || try(!endswith(var.vllm_image, ":latest") && can(regex("[:@]", var.vllm_image)), false)
    error_message = "Name a tag or a digest, and not latest: a new instance must not bring other code."
  }
}

variable "engine_options" {
  description = "vLLM's own settings, by their names in its EngineArgs, such as { tensor_parallel_size = 2, gpu_memory_utilization = 0.9 }. Only with the engine vllm."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for name in keys(var.engine_options) : can(regex("^[a-z][a-z0-9]*(_[a-z0-9]+)*$", name))])
    error_message = "Write each name as in vLLM's EngineArgs: small letters, digits and single underscores, such as tensor_parallel_size."
  }

  validation {
    condition     = var.engine == "vllm" || length(var.engine_options) == 0
    error_message = "Only the engine vllm takes engine_options."
  }

  validation {
    condition     = try(tonumber(var.engine_options.tensor_parallel_size), 1) <= var.gpus_per_worker
    error_message = "tensor_parallel_size is at most gpus_per_worker: a worker sees only its own GPUs."
  }
}

variable "role" {
  description = "What all workers of the fleet compute of interactive requests: both, or prefill or decode, each with a fleet of the other role and the same models. A machine holds one prefill worker, since they share its port: give them machines with one GPU."
  type        = string
  default     = "both"

  validation {
    condition     = contains(["both", "prefill", "decode"], var.role)
    error_message = "role is both, prefill or decode."
  }

  validation {
    condition     = var.role == "both" || (var.engine != "vllm" && var.engine != "transformers" && var.gpus_per_worker == 1)
    error_message = "Only tokenmill's own engine on one GPU exchanges KV blocks: leave role out, or use the engine auto or tokenmill with gpus_per_worker = 1."
  }

  validation {
    condition     = var.role == "both" || var.kv_transfer != null
    error_message = "Workers with a role exchange KV blocks: set kv_transfer_port of the module network, and pass its output kv_transfer."
  }
}

variable "kv_transfer" {
  description = "The module network's output: port of KV transfers, and the security group within which it is open. Only for workers with a role."
  type = object({
    port              = number
    security_group_id = string
  })
  default = null
}

variable "models" {
  description = "Models to serve, each as NAME=MODEL. NAME is its name in requests; MODEL is s3://BUCKET/PREFIX, a hub name (needs NAT), or a path in the image. Of several, one is loaded at a time."
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

  validation {
    condition     = length([for option in var.options : option if split("=", option)[0] == "--role"]) == 0
    error_message = "Set role instead of the option --role: it also opens the port of KV transfers."
  }
}

variable "bucket_arn" {
  description = "The installation's bucket."
  type        = string
}

variable "environment" {
  description = "TOKENMILL_ variables: the other modules' outputs named environment, and more settings."
  type        = map(string)

  validation {
    condition     = !contains(keys(var.environment), "TOKENMILL_ENGINE")
    error_message = "Set engine instead of TOKENMILL_ENGINE: it also selects the image."
  }

  validation {
    condition     = !contains(keys(var.environment), "TOKENMILL_KV_TRANSFER__PORT")
    error_message = "Set kv_transfer_port of the module network instead of TOKENMILL_KV_TRANSFER__PORT: it also opens the port."
  }
}

variable "secrets" {
  description = "Environment variables with secret values: name -> ARN of the secret."
  type        = map(string)
}

variable "kms_key_arns" {
  description = "Keys that objects, secrets and the log are encrypted with, if they are the account's own. The first encrypts the log."
  type        = list(string)
  default     = []
}

variable "pools" {
  description = "Pools of machines. purchase: on_demand or spot. instance_types: each with at least gpus_per_worker GPUs that can hold the models. weight: share of the workers, after the first base workers, which one pool may have. max_instances: limits the cost."
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
  description = "GPUs of each worker. An instance with more GPUs runs several workers."
  type        = number
  default     = 1
}

variable "memory_mib" {
  description = "Memory that is reserved for each worker at placement; it may use more."
  type        = number
  default     = 8192
}

variable "scaling" {
  description = "Number of workers. min: 0 if there may be none while idle; 1 or more for interactive requests. target_seconds: completion target of work without a deadline. cold_start_seconds: time from the decision to start a worker until it computes. idle_minutes: minutes without desired workers before scaling in to min. Pass the same values to the module control, whose dispatcher computes the desired workers."
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
  description = "CloudWatch namespace to which the dispatcher reports the backlog."
  type        = string
  default     = "tokenmill"
}

variable "checkpoint_seconds" {
  description = "Interval between checkpoints: the most work that a killed worker loses. Each checkpoint is a write to S3 for each open shard."
  type        = number
  default     = 15
}

variable "lane_drain_seconds" {
  description = "Time for interactive requests to end when their worker is stopped. Other workers continue the rest."
  type        = number
  default     = 20

  validation {
    condition     = var.lane_drain_seconds <= 60
    error_message = "A spot instance is gone after two minutes: give 60 at most."
  }
}

variable "deployment" {
  description = "Percentages of the workers that run at least and at most during a deployment. Without room for one more worker, use 0 and 100; then work stops while a model loads."
  type = object({
    minimum_healthy = optional(number, 50)
    maximum         = optional(number, 200)
  })
  default = {}
}

variable "ami_id" {
  description = "AMI of the instances. null: Amazon's newest ECS-optimized Amazon Linux 2023 for GPUs at the time of apply."
  type        = string
  default     = null
}

variable "root_volume_gib" {
  description = "Size of the root volume, for the system and the image. It also holds the weights if the instance has no NVMe disks."
  type        = number
  default     = 100
}

variable "max_instance_days" {
  description = "Days after which an instance is replaced, so that it gets security updates."
  type        = number
  default     = 30

  validation {
    condition     = var.max_instance_days >= 1 && var.max_instance_days <= 365
    error_message = "Give 1 to 365."
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
  description = "Tags of all resources of this module, instances and disks included."
  type        = map(string)
  default     = {}
}
