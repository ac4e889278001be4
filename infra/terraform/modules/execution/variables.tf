variable "name" {
  description = "Prefix of the role's name, NAME-execution."
  type        = string
}

variable "image" {
  description = "The containers' image. The role may pull it from ECR; other registries need no right."
  type        = string
}

variable "log_group_arns" {
  description = "ARNs of the containers' log groups."
  type        = list(string)
}

variable "secrets" {
  description = "Environment variables with secret values: name -> ARN of the secret."
  type        = map(string)
}

variable "kms_key_arns" {
  description = "Keys that the secrets are encrypted with, if they are the account's own."
  type        = list(string)
}

variable "tags" {
  description = "Tags of the role."
  type        = map(string)
}
