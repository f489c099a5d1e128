"""Tachyscope's nodes for ComfyUI: put this folder into ComfyUI/custom_nodes."""

from tachyscope.integrations.comfyui import comfy_entrypoint

__all__ = ["comfy_entrypoint"]
