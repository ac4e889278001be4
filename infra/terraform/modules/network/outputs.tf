output "vpc_id" {
  description = "The VPC."
  value       = aws_vpc.this.id
}

output "cidr" {
  description = "Its addresses."
  value       = var.cidr
}

output "private_subnet_ids" {
  description = "A subnet of each zone, in the zones' order. Everything of an installation runs here."
  value       = [for zone in var.availability_zones : aws_subnet.private[zone].id]
}

output "public_subnet_ids" {
  description = "A public subnet of each zone, if there are any: for NAT and for a balancer that the internet reaches."
  value       = [for zone in keys(local.public) : aws_subnet.public[zone].id]
}
