output "role_arn" {
  description = "ARN of the role, once its policy is attached."
  value       = aws_iam_role.this.arn
  depends_on  = [aws_iam_role_policy.this]
}

output "trust" {
  description = "Trust policy that lets ECS tasks of this account assume a role. The roles of the processes use it, too."
  value       = data.aws_iam_policy_document.trust.json
}
