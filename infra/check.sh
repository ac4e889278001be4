#!/usr/bin/env bash
# Checks each module and example with terraform fmt, init, validate and test, in a copy that keeps the repository clean.
# Without a registry, set TERRAFORM_PLUGINS to a folder with the provider.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/terraform"

command -v terraform >/dev/null || {
  echo "error: terraform is missing: 1.11 or newer, from https://developer.hashicorp.com/terraform/install" >&2
  exit 1
}
# Terraform warns at each command about a CLI configuration file that is missing.
[[ -e "${TF_CLI_CONFIG_FILE:-/}" ]] || unset TF_CLI_CONFIG_FILE
export CHECKPOINT_DISABLE=1 TF_IN_AUTOMATION=1

terraform fmt -check -diff -recursive .

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r . "$copy/terraform"
cd "$copy/terraform"
export TF_PLUGIN_CACHE_DIR="$copy/plugins"
mkdir "$TF_PLUGIN_CACHE_DIR"
for folder in modules/* examples/*; do
  echo "$folder"
  plugins=(${TERRAFORM_PLUGINS:+-plugin-dir="$TERRAFORM_PLUGINS"})
  terraform -chdir="$folder" init -no-color -input=false "${plugins[@]}" >init.log || { cat init.log; exit 1; }
  terraform -chdir="$folder" validate -no-color >/dev/null
  if [[ -d "$folder/tests" ]]; then
    terraform -chdir="$folder" test -no-color
  else
    echo "  valid; no tests of its own"
  fi
done
