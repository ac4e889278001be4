# Three roles: ECS itself (image, log, secrets), our process (the bucket, the weights), and the instance, which may do no
# more than be one of its cluster.

locals {
  repository = try(regex("^([0-9]{12})\\.dkr\\.ecr\\.([a-z0-9-]+)\\.amazonaws\\.com/([^:@]+)", var.image), null)
  account    = data.aws_caller_identity.current.account_id
}

data "aws_iam_policy_document" "tasks_trust" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["ecs-tasks.amazonaws.com"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [local.account]
    }
  }
}

data "aws_iam_policy_document" "execution" {
  statement {
    sid       = "Log"
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents"]
    resources = ["${aws_cloudwatch_log_group.this.arn}:*"]
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
      resources = ["*"] # it is not about any one resource
    }
  }
}

resource "aws_iam_role" "execution" {
  name               = "${local.full}-execution"
  assume_role_policy = data.aws_iam_policy_document.tasks_trust.json
  tags               = var.tags
}

resource "aws_iam_role_policy" "execution" {
  name   = "execution"
  role   = aws_iam_role.execution.id
  policy = data.aws_iam_policy_document.execution.json
}

# A worker reads shards, writes checkpoints and parts, and makes its models known. It sees no input, no file and no key.
data "aws_iam_policy_document" "task" {
  statement {
    sid       = "Names"
    actions   = ["s3:ListBucket"]
    resources = concat([var.bucket_arn], distinct([for arn in var.model_arns : split("/", arn)[0]]))
  }

  statement {
    sid       = "Read"
    actions   = ["s3:GetObject", "s3:GetObjectVersion"]
    resources = concat([for part in ["canaries", "catalog", "jobs", "releases", "versions", ".tmp"] : "${var.bucket_arn}/${part}/*"], var.model_arns)
  }

  statement {
    sid       = "Write"
    actions   = ["s3:PutObject", "s3:AbortMultipartUpload"]
    resources = [for part in ["canaries", "catalog", "jobs", "releases", "versions", ".tmp"] : "${var.bucket_arn}/${part}/*"]
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
  assume_role_policy = data.aws_iam_policy_document.tasks_trust.json
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
    resources = ["*"] # it is not about any one resource
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
