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
  description = "One zone is enough; two have more GPUs. The NAT gateway is in the first."
  type        = list(string)
}

variable "bucket_name" {
  description = "Name of the installation's bucket, unique in all of AWS."
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
  description = "Models to serve, each as NAME=MODEL: s3://BUCKET/PREFIX, or a hub name, which needs this example's NAT."
  type        = list(string)
}

variable "model_arns" {
  description = "ARNs of the objects that s3:// models are read from."
  type        = list(string)
  default     = []
}

variable "instance_types" {
  description = "Instance types that can hold the models. The first available one is used."
  type        = list(string)
  default     = ["g6.xlarge", "g5.xlarge"]
}

variable "ami_id" {
  description = "AMI of the GPU instance. null: Amazon's newest ECS-optimized Amazon Linux 2023 for GPUs."
  type        = string
  default     = null
}

variable "environment" {
  description = "More TOKENMILL_ settings, for all processes."
  type        = map(string)
  default     = {}
}

variable "emails" {
  description = "E-mail addresses that receive alarms and budget notifications."
  type        = list(string)
  default     = []
}

variable "monthly_budget" {
  description = "In US dollars. The emails are notified before a month costs more."
  type        = number
  default     = 300
}

variable "secret_recovery_days" {
  description = "Days for which the deleted secret can be restored; 0 frees its name at once."
  type        = number
  default     = 7
}
