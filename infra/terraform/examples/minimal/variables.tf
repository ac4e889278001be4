variable "name" {
  description = "Of the installation; every resource's name begins with it."
  type        = string
  default     = "tokenmill"
}

variable "region" {
  description = "Where it runs."
  type        = string
}

variable "availability_zones" {
  description = "One is enough; two have more GPUs. The NAT gateway stands in the first."
  type        = list(string)
}

variable "bucket_name" {
  description = "Of the bucket that holds everything; unique in all of AWS."
  type        = string
}

variable "force_destroy" {
  description = "Whether terraform destroy may delete the bucket with all that is in it."
  type        = bool
  default     = false
}

variable "control_image" {
  description = "The image of the control side, by tag or digest."
  type        = string
}

variable "worker_image" {
  description = "The image of the worker, by tag or digest."
  type        = string
}

variable "models" {
  description = "What is served, each as NAME=MODEL: s3://BUCKET/PREFIX, or a hub name, since there is NAT here."
  type        = list(string)
}

variable "model_arns" {
  description = "ARNs of the objects that s3:// models are read from."
  type        = list(string)
  default     = []
}

variable "instance_types" {
  description = "That can hold the models; the first that can be had is taken."
  type        = list(string)
  default     = ["g6.xlarge", "g5.xlarge"]
}

variable "ami_id" {
  description = "Of the GPU instance. null: Amazon's newest ECS-optimized Amazon Linux 2023 for GPUs."
  type        = string
  default     = null
}

variable "environment" {
  description = "Your own TOKENMILL_ settings, for all processes."
  type        = map(string)
  default     = {}
}

variable "emails" {
  description = "Who is told of alarms and of the budget."
  type        = list(string)
  default     = []
}

variable "monthly_budget" {
  description = "In US dollars; the emails are told before a month costs more."
  type        = number
  default     = 300
}

variable "secret_recovery_days" {
  description = "For how long the deleted secret can be restored; 0 frees its name at once."
  type        = number
  default     = 7
}
