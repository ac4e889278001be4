# One key for the bucket, Kafka, Redis, secrets and logs. Disks of instances use AWS's own: they hold only images, and
# Auto Scaling would need a grant of its own.

data "aws_iam_policy_document" "key" {
  # checkov:skip=CKV_AWS_109: a key policy covers its own key only, and must stay changeable; the account's policies limit by whom
  # checkov:skip=CKV_AWS_111: the same
  # checkov:skip=CKV_AWS_356: the same: "*" is this key

  statement {
    sid       = "TheAccountDecides"
    actions   = ["kms:*"]
    resources = ["*"] # in a key policy, * is this key

    principals {
      type        = "AWS"
      identifiers = ["arn:aws:iam::${data.aws_caller_identity.current.account_id}:root"]
    }
  }

  statement {
    sid       = "LogsOfThisInstallation"
    actions   = ["kms:Encrypt", "kms:Decrypt", "kms:ReEncryptFrom", "kms:ReEncryptTo", "kms:GenerateDataKey", "kms:DescribeKey"]
    resources = ["*"]

    principals {
      type        = "Service"
      identifiers = ["logs.${var.region}.amazonaws.com"]
    }

    condition {
      test     = "ArnLike"
      variable = "kms:EncryptionContext:aws:logs:arn"
      values   = ["arn:aws:logs:${var.region}:${data.aws_caller_identity.current.account_id}:log-group:/tokenmill/${var.name}/*"]
    }
  }

  statement {
    sid       = "AlarmsAndTheBudgetTell"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
    resources = ["*"]

    principals {
      type        = "Service"
      identifiers = ["cloudwatch.amazonaws.com", "budgets.amazonaws.com"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [data.aws_caller_identity.current.account_id]
    }
  }
}

resource "aws_kms_key" "this" {
  description             = "Data of ${var.name}"
  enable_key_rotation     = true
  deletion_window_in_days = 30
  policy                  = data.aws_iam_policy_document.key.json
  tags                    = local.tags
}

resource "aws_kms_alias" "this" {
  name          = "alias/${var.name}"
  target_key_id = aws_kms_key.this.key_id
}
