"""Audio for Whisper: samples from arrays and files, and their log-mel features.

    samples = read_samples("talk.wav", 16_000)        # float32 [n], one channel
    log_mel(samples, num_mel_bins=80)                 # float32 [80, frames]

`samples`: arrays and files. `wav`: reads WAV files. `ffmpeg`: other files and other sample rates, by PyAV, which needs
the extra: pip install "outrider[audio]". `features`: log-mel features.
"""

from outrider.inputs.audio.features import log_mel, mel_filters
from outrider.inputs.audio.samples import read_samples

__all__ = ["log_mel", "mel_filters", "read_samples"]
