terraform {
  required_version = ">= 1.11, < 2.0"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "5.100.0"
    }
  }

  # State holds the token of Redis. Keep it where only those may read who may see that, for instance:
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
