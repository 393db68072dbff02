"""Checkpoints: whole or absent, verified to the last byte, and read in any layout of the pipeline.

checkpoints/step-00000100/rank-0/manifest.json         what the share is: `manifest`
                                 tensors.safetensors   its tensors
                          rank-1/                      on the disk of rank 1's machine, which may be another

save      each rank writes its own share, since machines need not have a disk in common. It flushes a hidden folder
          to disk and renames it once all ranks have done so. A crash at any moment leaves older steps as they were
state     tensors and codec states that a rank writes, by names that mean the same in any layout
search    the step to resume from: the newest of which the ranks together have every share, verified byte by byte
resume    which rank takes which tensors from which share, and their way from the disk that has them
"""
