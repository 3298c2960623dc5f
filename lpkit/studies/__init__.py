"""The experiments that notebooks make, one file each. Each stands alone and may be deleted without
touching training."""
