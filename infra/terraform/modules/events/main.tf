# S3 sends a notification of each dropped file to a queue. The queue only saves time: listing finds files that it loses.

data "aws_caller_identity" "current" {}

resource "aws_sqs_queue" "dead" {
  name                      = "${var.name}-drops-dead"
  message_retention_seconds = 1209600 # 14 days, the most
  sqs_managed_sse_enabled   = true
  tags                      = var.tags
}

resource "aws_sqs_queue" "drops" {
  name                       = "${var.name}-drops"
  message_retention_seconds  = 1209600
  visibility_timeout_seconds = 60 # the intake requests the same timeout, and renews it while it works
  receive_wait_time_seconds  = 20
  sqs_managed_sse_enabled    = true
  tags                       = var.tags

  redrive_policy = jsonencode({
    deadLetterTargetArn = aws_sqs_queue.dead.arn
    maxReceiveCount     = var.max_receive_count
  })
}

# No other queue may use this dead-letter queue.
resource "aws_sqs_queue_redrive_allow_policy" "dead" {
  queue_url = aws_sqs_queue.dead.id

  redrive_allow_policy = jsonencode({
    redrivePermission = "byQueue"
    sourceQueueArns   = [aws_sqs_queue.drops.arn]
  })
}

data "aws_iam_policy_document" "drops" {
  statement {
    sid       = "OurBucketTellsOfDrops"
    actions   = ["sqs:SendMessage"]
    resources = [aws_sqs_queue.drops.arn]

    principals {
      type        = "Service"
      identifiers = ["s3.amazonaws.com"]
    }

    condition {
      test     = "ArnEquals"
      variable = "aws:SourceArn"
      values   = [var.bucket_arn]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [data.aws_caller_identity.current.account_id]
    }
  }

  statement {
    sid       = "OnlyOverTls"
    effect    = "Deny"
    actions   = ["sqs:*"]
    resources = [aws_sqs_queue.drops.arn]

    principals {
      type        = "AWS"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_sqs_queue_policy" "drops" {
  queue_url = aws_sqs_queue.drops.id
  policy    = data.aws_iam_policy_document.drops.json
}

resource "aws_s3_bucket_notification" "drops" {
  bucket = var.bucket

  dynamic "queue" {
    for_each = var.prefixes

    content {
      id            = "${var.name}-${replace(trimsuffix(queue.key, "/"), "/", "-")}"
      queue_arn     = aws_sqs_queue.drops.arn
      events        = ["s3:ObjectCreated:*"]
      filter_prefix = queue.key
    }
  }

  depends_on = [aws_sqs_queue_policy.drops] # S3 sends a test message to the queue when the notification is created
}

data "aws_iam_policy_document" "intake" {
  statement {
    sid       = "Drops"
    actions   = ["sqs:ReceiveMessage", "sqs:DeleteMessage", "sqs:ChangeMessageVisibility"]
    resources = [aws_sqs_queue.drops.arn]
  }

  source_policy_documents = [for document in data.aws_iam_policy_document.kafka : document.json]
}
