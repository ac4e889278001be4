# Least privileges of each service. In the bucket they depend on the first part of an object key. infra/apply_locally.py
# checks the table below against the processes' requests.

locals {
  prefixes = [for prefix in var.prefixes : trimsuffix(prefix, "/")]

  # All may list keys; otherwise S3 would answer 403 instead of 404 for a missing key.
  access = {
    intake = {
      read   = concat(["active", "announced", "catalog", "close", "deadletters", "intake", "jobs", "owed", "releases", "taken", "tenants", "versions", "webhooks"], local.prefixes)
      write  = ["active", "announced", "close", "deadletters", "intake", "jobs", "owed", "taken", "tenants", "webhooks"]
      delete = ["announced", "owed"]
    }
    dispatcher = {
      read   = concat(["active", "announced", "batches", "canaries", "catalog", "close", "deadletters", "experiments", "files", "finalizing", "intake", "jobs", "releases", "scaling", "taken", "tenants", "versions", "webhooks"], local.prefixes)
      write  = ["active", "catalog", "close", "experiments", "finalizing", "jobs", "releases", "scaling", "tenants", "webhooks"]
      delete = ["active", "announced", "batches", "close", "deadletters", "files", "intake", "jobs", "releases", "taken", "tenants", "webhooks"]
    }
    gateway = {
      read   = ["active", "batches", "catalog", "close", "files", "finalizing", "jobs", "keys", "tenants", "versions", "webhooks"]
      write  = ["active", "batches", "close", "files", "finalizing", "jobs", "tenants", "webhooks"]
      delete = ["batches", "close", "files", "finalizing", "tenants", "webhooks"]
    }
  }
}

module "execution" {
  source = "../execution"

  name           = "${var.name}-control"
  image          = var.image
  log_group_arns = [for group in aws_cloudwatch_log_group.this : group.arn]
  secrets        = var.secrets
  kms_key_arns   = var.kms_key_arns
  tags           = var.tags
}

# --- tokenmill's processes

data "aws_iam_policy_document" "task" {
  for_each = local.services

  statement {
    sid       = "Names"
    actions   = ["s3:ListBucket"]
    resources = [var.bucket_arn]
  }

  statement {
    sid     = "Read"
    actions = ["s3:GetObject", "s3:GetObjectVersion"]
    resources = concat(
      [for part in concat(local.access[each.key].read, [".tmp"]) : "${var.bucket_arn}/${part}/*"],
      each.key == "dispatcher" ? ["${var.bucket_arn}/job.json"] : [], # the dispatcher checks whether the root is a single job
    )
  }

  statement {
    sid       = "Write"
    actions   = ["s3:PutObject", "s3:AbortMultipartUpload"]
    resources = [for part in concat(local.access[each.key].write, [".tmp"]) : "${var.bucket_arn}/${part}/*"]
  }

  statement {
    sid       = "Delete"
    actions   = ["s3:DeleteObject"]
    resources = [for part in concat(local.access[each.key].delete, [".tmp"]) : "${var.bucket_arn}/${part}/*"]
  }

  # Jobs by reference: the intake checks the object, the dispatcher reads it.
  dynamic "statement" {
    for_each = each.key != "gateway" && length(var.readable_buckets) > 0 ? [true] : []

    content {
      sid       = "ReadInputs"
      actions   = ["s3:GetObject", "s3:GetObjectVersion", "s3:ListBucket"]
      resources = flatten([for arn in var.readable_buckets : [arn, "${arn}/*"]])
    }
  }

  dynamic "statement" {
    for_each = length(var.kms_key_arns) > 0 ? [true] : []

    content {
      sid       = "Encrypt"
      actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
      resources = var.kms_key_arns
    }
  }

  dynamic "statement" {
    for_each = each.key == "dispatcher" ? [true] : []

    content {
      sid       = "TellTheBacklog"
      actions   = ["cloudwatch:PutMetricData"]
      resources = ["*"] # the action has no resource; the condition restricts it to the installation's namespace

      condition {
        test     = "StringEquals"
        variable = "cloudwatch:namespace"
        values   = [var.metric_namespace]
      }
    }
  }

  source_policy_documents = each.key == "intake" ? [var.intake_policy] : []
}

resource "aws_iam_role" "task" {
  for_each = local.services

  name               = "${var.name}-${each.key}"
  assume_role_policy = module.execution.trust
  tags               = var.tags
}

resource "aws_iam_role_policy" "task" {
  for_each = local.services

  name   = each.key
  role   = aws_iam_role.task[each.key].id
  policy = data.aws_iam_policy_document.task[each.key].json
}
