output "role_arn" {
  description = "Of the role, once it has its rights."
  value       = aws_iam_role.this.arn
  depends_on  = [aws_iam_role_policy.this]
}

output "trust" {
  description = "Who may take a role of a container of this account: ECS, for the role of our process in it, too."
  value       = data.aws_iam_policy_document.trust.json
}
