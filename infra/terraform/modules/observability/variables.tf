variable "name" {
  description = "Of the installation; every resource's name begins with it."
  type        = string
}

variable "emails" {
  description = "Who is told of alarms and of the budget. Each gets a mail to confirm first."
  type        = list(string)
  default     = []
}

variable "kms_key_arn" {
  description = "Encrypts what is told; its policy must let CloudWatch and Budgets use it. null: not encrypted at rest."
  type        = string
  default     = null
}

variable "metric_namespace" {
  description = "Where the dispatcher tells the backlog."
  type        = string
  default     = "tokenmill"
}

variable "queue_name" {
  description = "The queue of drops."
  type        = string
}

variable "dead_letter_queue_name" {
  description = "Its dead letters' queue."
  type        = string
}

variable "redis_node_ids" {
  description = "The cache's nodes."
  type        = list(string)
}

variable "fleets" {
  description = "Fleets of workers: their models, and the seconds of backlog from which on somebody should look."
  type = map(object({
    model_names     = list(string)
    backlog_seconds = optional(number, 21600)
  }))
}

variable "control" {
  description = "ECS's cluster of the control side, and the services that always run there."
  type = object({
    cluster_name  = string
    service_names = list(string)
  })
}

variable "balancer" {
  description = "The suffixes of the gateways' balancer and of its target group. null: there is none."
  type = object({
    arn_suffix          = string
    target_group_suffix = string
  })
  default = null
}

variable "kafka" {
  description = "MSK's cluster and how many brokers it has. null: there is none."
  type = object({
    cluster_name = string
    brokers      = number
  })
  default = null
}

variable "monthly_budget" {
  description = "In US dollars: whoever is in emails is told when 80 % are spent, and when a month is going to cost more. It stops nothing. null: none."
  type        = number
  default     = null
}

variable "budget_tag" {
  description = "The tag by which the budget knows this installation's costs, as KEY=VALUE. It has to be activated as a cost allocation tag. null: all costs of the account count."
  type        = string
  default     = null

  validation {
    condition     = var.budget_tag == null || can(regex("^[^=]+=[^=]+$", var.budget_tag))
    error_message = "Give KEY=VALUE."
  }
}

variable "tags" {
  description = "Of everything here."
  type        = map(string)
  default     = {}
}
