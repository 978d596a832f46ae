"""The keys of MindSpeed-MM's files, and what each becomes; a page of the docs is made of them."""

from mm_mindspeed.tables.data import DATA
from mm_mindspeed.tables.engine import ENGINE
from mm_mindspeed.tables.flags import FLAGS
from mm_mindspeed.tables.language import LANGUAGE, LANGUAGE_DATA
from mm_mindspeed.tables.one_file import ONE_FILE
from mm_mindspeed.tables.video import HUNYUAN, VIDEO

TABLES = {
    "Flags of the launch script, or `gpt_args` of a YAML": FLAGS,
    "fsdp2_config.yaml and zero_config.yaml": ENGINE,
    "model.json of Wan": VIDEO,
    "model.json of HunyuanVideo 1.5": HUNYUAN,
    "data.json of clips": DATA,
    "model.json of vision-language models": LANGUAGE,
    "data.json of conversations": LANGUAGE_DATA,
    "The YAML of FSDP2 runs": ONE_FILE,
}
"""Table -> its rows, by the title on the page."""
