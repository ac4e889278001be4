"""One model on several devices of one machine, a process each: tensor parallelism within a layer, and pipeline
parallelism, stages of layers."""
