variable "name" {
  description = "Name of the installation. Every resource's name begins with it."
  type        = string
  default     = "tokenmill"
}

variable "region" {
  description = "AWS region."
  type        = string
}

variable "availability_zones" {
  description = "Three zones, for MSK. All of them must offer the instance types of the pools."
  type        = list(string)

  validation {
    condition     = length(var.availability_zones) >= 2
    error_message = "Give two zones at least; three are better."
  }
}

variable "bucket_name" {
  description = "Name of the installation's bucket, unique in all of AWS."
  type        = string
}

variable "weights_bucket" {
  description = "The bucket that holds the weights; the pools' models name their paths in it. There is no route to the internet, so hub names do not work."
  type        = string
}

variable "force_destroy" {
  description = "Whether terraform destroy may delete the bucket with all that is in it."
  type        = bool
  default     = false
}

variable "control_image" {
  description = "The image of the control side, by its digest, in a registry (ECR) of this region."
  type        = string
}

variable "worker_image" {
  description = "The image of workers, by its digest, in a registry (ECR) of this region."
  type        = string
}

variable "vllm_image" {
  description = "The image of workers whose engine is vLLM, by its digest, in a registry (ECR) of this region. null: no fleet has the engine vllm."
  type        = string
  default     = null

  validation {
    condition     = var.vllm_image != null || alltrue([for fleet in values(var.fleets) : fleet.engine != "vllm"])
    error_message = "A fleet has the engine vllm: set vllm_image, since worker_image does not contain vLLM."
  }
}

variable "fleets" {
  description = "Fleets of workers, each for its models, on pools of machines bought on demand or as spot. See the module workers for each field."
  type = map(object({
    models          = list(string)
    role            = optional(string, "both")
    options         = optional(list(string), [])
    engine          = optional(string, "auto")
    engine_options  = optional(map(string), {})
    gpus_per_worker = optional(number, 1)
    memory_mib      = optional(number, 8192)
    pools = map(object({
      purchase       = string
      instance_types = list(string)
      max_instances  = number
      weight         = optional(number, 1)
      base           = optional(number, 0)
    }))
    scaling = object({
      min                = optional(number, 0)
      max                = number
      target_seconds     = optional(number, 3600)
      cold_start_seconds = optional(number, 300)
      idle_minutes       = optional(number, 15)
    })
    backlog_seconds = optional(number, 21600)
  }))
}

variable "kv_transfer_port" {
  description = "Port on which prefill workers serve KV blocks to decode workers. Open between workers with a role only, if there are any."
  type        = number
  default     = 9200
}

variable "prefixes" {
  description = "Prefixes for dropped files: a prefix with its slash -> the tenant that owns the files."
  type        = map(string)
  default     = { "incoming/" = "default" }
}

variable "kafka" {
  description = "Sizes of MSK's brokers. null: no Kafka."
  type = object({
    instance_type   = optional(string, "kafka.m7g.large")
    volume_gib      = optional(number, 100)
    partitions      = optional(number, 12)
    retention_hours = optional(number, 72)
  })
  default = {}
}

variable "redis" {
  description = "Sizes of the cache."
  type = object({
    node_type = optional(string, "cache.r7g.large")
    replicas  = optional(number, 1)
  })
  default = {}
}

variable "gateway" {
  description = "HTTP behind an internal balancer, reachable from the VPC and the networks connected to it. null: none."
  type = object({
    certificate_arn   = string
    allowed_cidrs     = list(string)
    count             = optional(number, 2)
    access_log_bucket = optional(string)
    delete_protection = optional(bool, true)
  })
}

variable "ami_id" {
  description = "AMI of the GPU instances. null: Amazon's newest ECS-optimized Amazon Linux 2023 for GPUs."
  type        = string
  default     = null
}

variable "environment" {
  description = "More TOKENMILL_ settings, for all processes."
  type        = map(string)
  default     = { TOKENMILL_RETENTION__OUTPUTS = "90d" }
}

variable "emails" {
  description = "E-mail addresses that receive alarms and budget notifications."
  type        = list(string)
  default     = []
}

variable "monthly_budget" {
  description = "In US dollars. The emails are notified before a month costs more."
  type        = number
}
