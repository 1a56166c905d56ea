"""Small random S2-VAEs for probes of small models."""

import torch

from pullback.learning.s2vae import S2VAE, S2VAEConfig
from pullback.probes import ProbeMap


def tiny_vae(
    probe: ProbeMap, registers: int = 2, latent: int = 4, posterior: str = "power-spherical", **changes
) -> S2VAE:
    """A VAE of what the decoder of a probe reads, in the dtype of its backbone; every parameter is random."""
    layers = probe.decoder.layers
    sizes = {"width": 16, "heads": 2, "blocks": 1, "prefix": probe.backbone.prefix, **changes}
    dims = (probe.backbone.tap_dim,) * len(layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = S2VAE(S2VAEConfig(dims, layers, registers=registers, latent=latent, posterior=posterior, **sizes))
        vae = vae.to(probe.backbone.dtype).eval().requires_grad_(False)
        for value in vae.parameters():
            value.add_(0.3 * torch.randn_like(value) if value.ndim > 1 else 0.1 * torch.randn_like(value))
    return vae
