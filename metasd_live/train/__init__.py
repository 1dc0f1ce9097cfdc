"""Training of drafters on text, the target's own as a rule.

`sources` gives the texts, `features` the target's hidden states on them; `causal`, `eagle` and `medusa` learn from them
in one `loop`, which a killed training resumes; `run` writes the folder. `vocabulary` counts tokens.
"""

from ..settings import CausalSettings, EagleSettings, MedusaSettings
from .causal import train_causal
from .eagle import train_eagle
from .medusa import train_medusa
from .run import Evaluation, check_training_out, train_drafter
from .sources import TrainingText, cut, cut_texts, output_sequences, output_texts, text_sequences
from .vocabulary import Vocabulary, count_vocabulary

__all__ = [
    "CausalSettings",
    "EagleSettings",
    "Evaluation",
    "MedusaSettings",
    "TrainingText",
    "Vocabulary",
    "check_training_out",
    "count_vocabulary",
    "cut",
    "cut_texts",
    "output_sequences",
    "output_texts",
    "text_sequences",
    "train_causal",
    "train_drafter",
    "train_eagle",
    "train_medusa",
]
