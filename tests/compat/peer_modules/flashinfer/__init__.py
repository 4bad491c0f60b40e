"""`flashinfer` over `attnops.compat`, for scripts that FlashInfer's tests start in processes of their own."""

from attnops.compat.flashinfer import *  # noqa: F403
