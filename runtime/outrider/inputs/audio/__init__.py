"""Audio for Whisper: samples from files and arrays, and their log-mel features.

samples = read_samples("talk.wav", 16_000)             # float32 [n], at 16 kHz
features = log_mel(samples, num_mel_bins=80)           # float32 [80, frames], 100 a second
"""

from outrider.inputs.audio.features import log_mel, mel_filters
from outrider.inputs.audio.samples import read_samples

__all__ = ["log_mel", "mel_filters", "read_samples"]
