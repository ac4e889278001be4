# The role with which ECS starts a container: it pulls the image, passes the secrets and writes the logs. The process in
# the container has another role.

data "aws_caller_identity" "current" {}

locals {
  # Account, region and name of a repository in ECR; null for images from elsewhere.
  repository = try(regex("^([0-9]{12})\\.dkr\\.ecr\\.([a-z0-9-]+)\\.amazonaws\\.com/([^:@]+)", var.image), null)
}

data "aws_iam_policy_document" "trust" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["ecs-tasks.amazonaws.com"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [data.aws_caller_identity.current.account_id]
    }
  }
}

data "aws_iam_policy_document" "execution" {
  statement {
    sid       = "Logs"
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents"]
    resources = [for arn in var.log_group_arns : "${arn}:*"]
  }

  statement {
    sid       = "Secrets"
    actions   = ["secretsmanager:GetSecretValue"]
    resources = values(var.secrets)
  }

  dynamic "statement" {
    for_each = length(var.kms_key_arns) > 0 ? [true] : []

    content {
      sid       = "Decrypt"
      actions   = ["kms:Decrypt"]
      resources = var.kms_key_arns
    }
  }

  dynamic "statement" {
    for_each = local.repository == null ? [] : [local.repository]

    content {
      sid       = "Image"
      actions   = ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer", "ecr:BatchCheckLayerAvailability"]
      resources = ["arn:aws:ecr:${statement.value[1]}:${statement.value[0]}:repository/${statement.value[2]}"]
    }
  }

  dynamic "statement" {
    for_each = local.repository == null ? [] : [true]

    content {
      sid       = "LogInToTheRegistry"
      actions   = ["ecr:GetAuthorizationToken"]
      resources = ["*"] # the action has no resource
    }
  }
}

resource "aws_iam_role" "this" {
  name               = "${var.name}-execution"
  assume_role_policy = data.aws_iam_policy_document.trust.json
  tags               = var.tags
}

resource "aws_iam_role_policy" "this" {
  name   = "execution"
  role   = aws_iam_role.this.id
  policy = data.aws_iam_policy_document.execution.json
}
