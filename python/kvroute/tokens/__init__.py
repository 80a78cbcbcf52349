"""A request's prompt as the engine sees it: token ids, exact or none.

Two sources: the engine's own ``/tokenize``, and a local tokenizer with the model's chat template (the extra
``kvroute[tokenizer]``). Neither is believed before it was compared with what the engine's generation endpoints make of
the same requests. What is not known to be exact has no tokens, and a reason. What the tokens are for is nothing to this
package.
"""

from kvroute.tokens.local import TokenizerError
from kvroute.tokens.prompts import Prompts, Tokens
from kvroute.tokens.request import Ask, NoTokens, read_ask

__all__ = ["Ask", "NoTokens", "Prompts", "TokenizerError", "Tokens", "read_ask"]
