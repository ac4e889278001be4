variable "name" {
  description = "Name of the installation. Every resource's name begins with it."
  type        = string
}

variable "emails" {
  description = "E-mail addresses that receive alarms and budget notifications. Each must confirm a first mail."
  type        = list(string)
  default     = []
}

variable "kms_key_arn" {
  description = "Key that encrypts notifications; its policy must let CloudWatch and Budgets use it. null: no encryption at rest."
  type        = string
  default     = null
}

variable "metric_namespace" {
  description = "CloudWatch namespace to which the dispatcher reports the backlog."
  type        = string
  default     = "tokenmill"
}

variable "queue_name" {
  description = "Queue of the notifications of dropped files."
  type        = string
}

variable "dead_letter_queue_name" {
  description = "Dead-letter queue of that queue."
  type        = string
}

variable "redis_node_ids" {
  description = "Ids of the Redis nodes."
  type        = list(string)
}

variable "fleets" {
  description = "Fleets of workers: their models, and the backlog in seconds above which an alarm fires."
  type = map(object({
    model_names     = list(string)
    backlog_seconds = optional(number, 21600)
  }))
}

variable "control" {
  description = "ECS cluster of the control side, and the services that always run in it."
  type = object({
    cluster_name  = string
    service_names = list(string)
  })
}

variable "balancer" {
  description = "ARN suffixes of the gateways' balancer and of its target group. null: no balancer."
  type = object({
    arn_suffix          = string
    target_group_suffix = string
  })
  default = null
}

variable "kafka" {
  description = "Name and number of brokers of the MSK cluster. null: no Kafka."
  type = object({
    cluster_name = string
    brokers      = number
  })
  default = null
}

variable "monthly_budget" {
  description = "In US dollars. The emails are notified when 80 % are spent, and when a month is forecast to exceed it. It limits no spending. null: no budget."
  type        = number
  default     = null
}

variable "budget_tag" {
  description = "Tag that selects this installation's costs for the budget, as KEY=VALUE. It must be activated as a cost allocation tag. null: all costs of the account."
  type        = string
  default     = null

  validation {
    condition     = var.budget_tag == null || can(regex("^[^=]+=[^=]+$", var.budget_tag))
    error_message = "Give KEY=VALUE."
  }
}

variable "tags" {
  description = "Tags of all resources of this module."
  type        = map(string)
  default     = {}
}
