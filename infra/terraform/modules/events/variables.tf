variable "name" {
  description = "Name of the installation. Every resource's name begins with it."
  type        = string
}

variable "bucket" {
  description = "The bucket that sends the notifications."
  type        = string
}

variable "bucket_arn" {
  description = "The bucket's ARN."
  type        = string
}

variable "prefixes" {
  description = "Prefixes for dropped files: a prefix with its slash -> the tenant that owns the files. No prefix may contain another."
  type        = map(string)
  default     = { "incoming/" = "default" }

  validation {
    condition     = length(var.prefixes) > 0 && alltrue([for prefix in keys(var.prefixes) : can(regex("^[^/].*/$", prefix))])
    error_message = "Give at least one prefix. Each begins without a slash and ends with one, such as incoming/."
  }

  validation {
    condition     = alltrue(flatten([for a in keys(var.prefixes) : [for b in keys(var.prefixes) : a == b || !startswith(a, b)]]))
    error_message = "No prefix may contain another: S3 refuses overlapping notifications."
  }
}

variable "max_receive_count" {
  description = "Deliveries after which a message moves to the dead-letter queue. The intake returns messages every two minutes while their tenant has too much queued work, so 100 deliveries are more than three hours. Listing still finds the files of these messages."
  type        = number
  default     = 100

  validation {
    condition     = var.max_receive_count >= 10 && var.max_receive_count <= 1000
    error_message = "Give 10 to 1000."
  }
}

variable "kafka" {
  description = "An MSK cluster for requests, results and events. null: none."
  type = object({
    vpc_id               = string
    subnet_ids           = list(string)
    client_cidrs         = list(string)
    version              = optional(string, "3.8.x")
    instance_type        = optional(string, "kafka.m7g.large")
    brokers_per_zone     = optional(number, 1)
    volume_gib           = optional(number, 100)
    partitions           = optional(number, 12)
    retention_hours      = optional(number, 72)
    topic_prefix         = optional(string, "tokenmill")
    monitoring           = optional(string, "DEFAULT")
    log_retention_days   = optional(number, 30)
    uri_prefixes         = optional(map(list(string)), {})
    request_topics       = optional(map(string), {})
    job_topics           = optional(map(string), {})
    consumer_group       = optional(string, "tokenmill-intake")
    allow_topic_creation = optional(bool, true)
  })
  default = null

  validation {
    condition     = try(length(var.kafka.subnet_ids), 2) >= 2
    error_message = "MSK needs subnets in at least two zones, preferably three."
  }
}

variable "kms_key_arn" {
  description = "Key that encrypts Kafka's disks and log. null: AWS's own keys. The queues always use SQS's own key, which costs nothing and lets S3 write."
  type        = string
  default     = null
}

variable "tags" {
  description = "Tags of all resources of this module."
  type        = map(string)
  default     = {}
}
