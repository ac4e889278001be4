mock_provider "aws" {
  source = "../../mocks"
}

variables {
  name           = "tokenmill-control"
  image          = "000000000000.dkr.ecr.eu-central-1.amazonaws.com/team/tokenmill-control@sha256:0000"
  log_group_arns = ["arn:aws:logs:eu-central-1:000000000000:log-group:/tokenmill/intake"]
  secrets        = { TOKENMILL_REDIS_URL = "arn:aws:secretsmanager:eu-central-1:000000000000:secret:redis" }
  kms_key_arns   = []
  tags           = {}
}

run "an_image_of_ecr" {
  assert {
    condition = {
      for statement in data.aws_iam_policy_document.execution.statement : statement.sid => tolist(statement.resources)
      } == {
      Logs               = tolist(["arn:aws:logs:eu-central-1:000000000000:log-group:/tokenmill/intake:*"])
      Secrets            = tolist(["arn:aws:secretsmanager:eu-central-1:000000000000:secret:redis"])
      Image              = tolist(["arn:aws:ecr:eu-central-1:000000000000:repository/team/tokenmill-control"])
      LogInToTheRegistry = tolist(["*"])
    }
    error_message = "ECS has other rights than to pull this image, read this secret and write these logs"
  }

  assert {
    condition     = one(one(data.aws_iam_policy_document.trust.statement).condition).variable == "aws:SourceAccount"
    error_message = "ECS of another account could assume the role"
  }
}

run "an_image_from_elsewhere_and_a_key" {
  variables {
    image        = "registry.example.com/tokenmill-control:1"
    kms_key_arns = ["arn:aws:kms:eu-central-1:000000000000:key/1"]
  }

  assert {
    condition     = sort([for statement in data.aws_iam_policy_document.execution.statement : statement.sid]) == tolist(["Decrypt", "Logs", "Secrets"])
    error_message = "a right is superfluous, or the key's is missing"
  }
}
