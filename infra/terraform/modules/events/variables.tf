variable "name" {
  description = "Of the installation; every resource's name begins with it."
  type        = string
}

variable "bucket" {
  description = "The bucket whose drops are told of."
  type        = string
}

variable "bucket_arn" {
  description = "Its ARN."
  type        = string
}

variable "places" {
  description = "Where files are dropped, and whose they are: a prefix with its slash -> the tenant. No place may lie in another."
  type        = map(string)
  default     = { "incoming/" = "default" }

  validation {
    condition     = length(var.places) > 0 && alltrue([for place in keys(var.places) : can(regex("^[^/].*/$", place))])
    error_message = "Give at least one place; each begins without and ends with a slash, such as incoming/."
  }

  validation {
    condition     = alltrue(flatten([for a in keys(var.places) : [for b in keys(var.places) : a == b || !startswith(a, b)]]))
    error_message = "No place may lie in another: S3 refuses notifications that overlap."
  }
}

variable "max_receive_count" {
  description = "After so many deliveries a message goes to the dead letters. An intake gives messages back on purpose, every two minutes while a tenant has too much work queued, so this counts hours, not mistakes: 100 are three hours and more. What lands there is found by the listing all the same."
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
    error_message = "MSK needs subnets in two zones at least, better three."
  }
}

variable "kms_key_arn" {
  description = "Encrypts Kafka's disks and its log. null: with keys of AWS's. The queues always use SQS's own key, which costs nothing and lets S3 write."
  type        = string
  default     = null
}

variable "tags" {
  description = "Of everything here."
  type        = map(string)
  default     = {}
}
