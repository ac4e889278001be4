# Three roles: ECS (image, log, secrets), the worker process (bucket, weights), and the instance, which may only join
# its cluster.

locals {
  account = data.aws_caller_identity.current.account_id
}

module "execution" {
  source = "../execution"

  name           = local.full
  image          = local.image
  log_group_arns = [aws_cloudwatch_log_group.this.arn]
  secrets        = var.secrets
  kms_key_arns   = var.kms_key_arns
  tags           = var.tags
}

# A worker reads shards, writes checkpoints and parts, and publishes its models in the catalog. It can't read inputs,
# uploaded files or API keys.
data "aws_iam_policy_document" "task" {
  statement {
    sid       = "Names"
    actions   = ["s3:ListBucket"]
    resources = concat([var.bucket_arn], distinct([for arn in var.model_arns : split("/", arn)[0]]))
  }

  statement {
    sid       = "Read"
    actions   = ["s3:GetObject", "s3:GetObjectVersion"]
    resources = concat([for part in ["canaries", "catalog", "experiments", "jobs", "releases", "versions", ".tmp"] : "${var.bucket_arn}/${part}/*"], var.model_arns)
  }

  statement {
    sid       = "Write"
    actions   = ["s3:PutObject", "s3:AbortMultipartUpload"]
    resources = [for part in ["canaries", "catalog", "experiments", "jobs", "releases", "versions", ".tmp"] : "${var.bucket_arn}/${part}/*"]
  }

  statement {
    sid       = "Delete"
    actions   = ["s3:DeleteObject"]
    resources = [for part in ["jobs", ".tmp"] : "${var.bucket_arn}/${part}/*"]
  }

  dynamic "statement" {
    for_each = length(var.kms_key_arns) > 0 ? [true] : []

    content {
      sid       = "Encrypt"
      actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
      resources = var.kms_key_arns
    }
  }
}

resource "aws_iam_role" "task" {
  name               = local.full
  assume_role_policy = module.execution.trust
  tags               = var.tags
}

resource "aws_iam_role_policy" "task" {
  name   = "worker"
  role   = aws_iam_role.task.id
  policy = data.aws_iam_policy_document.task.json
}

data "aws_iam_policy_document" "instance_trust" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

data "aws_iam_policy_document" "instance" {
  statement {
    sid       = "FindTheCluster"
    actions   = ["ecs:DiscoverPollEndpoint"]
    resources = ["*"] # the action has no resource
  }

  statement {
    sid = "BeOneOfTheCluster"
    actions = [
      "ecs:RegisterContainerInstance", "ecs:DeregisterContainerInstance",
      "ecs:SubmitTaskStateChange", "ecs:SubmitContainerStateChange", "ecs:SubmitAttachmentStateChanges",
    ]
    resources = [aws_ecs_cluster.this.arn]
  }

  statement {
    sid       = "BeItself"
    actions   = ["ecs:Poll", "ecs:StartTelemetrySession", "ecs:UpdateContainerInstancesState", "ecs:TagResource"]
    resources = ["arn:aws:ecs:${local.region}:${local.account}:container-instance/${local.full}/*"]
  }
}

resource "aws_iam_role" "instance" {
  name               = "${local.full}-instance"
  assume_role_policy = data.aws_iam_policy_document.instance_trust.json
  tags               = var.tags
}

resource "aws_iam_role_policy" "instance" {
  name   = "cluster"
  role   = aws_iam_role.instance.id
  policy = data.aws_iam_policy_document.instance.json
}

resource "aws_iam_instance_profile" "instance" {
  name = "${local.full}-instance"
  role = aws_iam_role.instance.name
  tags = var.tags
}
