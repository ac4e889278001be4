variable "name" {
  description = "The role is called NAME-execution."
  type        = string
}

variable "image" {
  description = "The containers' image. One in ECR may be fetched; one from elsewhere needs no right."
  type        = string
}

variable "log_group_arns" {
  description = "Where the containers log to."
  type        = list(string)
}

variable "secrets" {
  description = "Variables whose values are secrets: name -> ARN of the secret."
  type        = map(string)
}

variable "kms_key_arns" {
  description = "Keys that the secrets are encrypted with, if they are the account's own."
  type        = list(string)
}

variable "tags" {
  description = "Of the role."
  type        = map(string)
}
