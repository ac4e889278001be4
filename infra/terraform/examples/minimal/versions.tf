terraform {
  required_version = ">= 1.11, < 2.0"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "5.100.0"
    }
  }

  # The state holds the Redis token, so restrict read access to it. For example:
  # backend "s3" {
  #   bucket       = "…"
  #   key          = "tokenmill.tfstate"
  #   region       = "…"
  #   encrypt      = true
  #   use_lockfile = true
  # }
}

provider "aws" {
  region = var.region
}
