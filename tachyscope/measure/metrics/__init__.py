"""Published measures of pictures and videos, by their published weights: LPIPS and FVD."""
