variable "name" {
  description = "The name that callers use, such as llm.example.com. It can't be the zone's apex. The certificate of each region's balancer must cover it."
  type        = string

  validation {
    condition     = can(regex("^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\\.){2,}[a-z]{2,63}$", var.name))
    error_message = "Give a name below the zone, in small letters, such as llm.example.com."
  }
}

variable "zone_id" {
  description = "Id of the Route 53 hosted zone, public or private, that holds the name."
  type        = string
}

variable "regions" {
  description = "AWS region -> its gateways' balancer: dns_name of the output gateway, and alarm_name, the output gateway_alarm. Route 53 checks the region by the alarm; with alarm_name null it requests /readyz over the internet, which an internal balancer, or one whose allowed_cidrs exclude Route 53's checkers, never answers."
  type = map(object({
    dns_name   = string
    alarm_name = optional(string)
  }))

  validation {
    condition     = length(var.regions) > 0 && alltrue([for region in keys(var.regions) : can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", region))])
    error_message = "Give one region at least, each by its code, such as eu-central-1."
  }
}

variable "policy" {
  description = "How Route 53 chooses among healthy regions: weighted, by the weights; latency, the region with the least network latency for the caller's resolver."
  type        = string
  default     = "latency"

  validation {
    condition     = contains(["weighted", "latency"], var.policy)
    error_message = "Give weighted or latency."
  }
}

variable "weights" {
  description = "Region -> its weight among all; 1 where it is absent. 0 takes a region out: after the TTL it gets no new callers, not even when all others are unhealthy."
  type        = map(number)
  default     = {}

  validation {
    condition     = alltrue([for region in keys(var.weights) : contains(keys(var.regions), region)])
    error_message = "A weight names a region that is not in regions."
  }

  validation {
    condition     = alltrue([for weight in values(var.weights) : weight >= 0 && weight <= 255 && floor(weight) == weight])
    error_message = "Weights are whole numbers from 0 to 255."
  }

  validation {
    condition     = var.policy == "weighted" || alltrue([for weight in values(var.weights) : contains([0, 1], weight)])
    error_message = "The policy latency has no shares: a weight is 0 or 1."
  }

  validation {
    condition     = anytrue([for region in keys(var.regions) : lookup(var.weights, region, 1) > 0])
    error_message = "Leave one region with a weight above 0, or the name has no address."
  }
}

variable "ttl" {
  description = "Seconds for which resolvers may reuse an answer. So long after a region fails its checks, or is taken out, callers may still go to it."
  type        = number
  default     = 60

  validation {
    condition     = var.ttl >= 1 && var.ttl <= 3600
    error_message = "Give 1 to 3,600 seconds; with more, callers stay in a lost region for hours."
  }
}

variable "tags" {
  description = "Tags of all resources of this module."
  type        = map(string)
  default     = {}
}
