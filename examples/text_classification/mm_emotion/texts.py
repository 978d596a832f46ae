"""Words and sentences from which the texts are composed.

Every text names two emotions. The writer feels one of them today; the other belongs to another person or
another day, or is denied. Only the sentence around them decides which one it is, not a word.
"""

from __future__ import annotations

LABELS = ("sadness", "joy", "love", "anger", "fear", "surprise")

ENGLISH = {
    "sadness": ("sad", "miserable", "heartbroken", "gloomy", "sorrowful", "downcast"),
    "joy": ("happy", "cheerful", "delighted", "glad", "merry", "joyful"),
    "love": ("in love", "tender", "affectionate", "devoted", "fond of everyone", "full of love"),
    "anger": ("angry", "furious", "irritated", "outraged", "mad", "resentful"),
    "fear": ("afraid", "scared", "terrified", "anxious", "frightened", "nervous"),
    "surprise": ("surprised", "amazed", "astonished", "stunned", "startled", "speechless"),
}
CHINESE = {
    "sadness": ("难过", "伤心", "悲伤", "忧郁", "失落", "沮丧"),
    "joy": ("高兴", "开心", "快乐", "喜悦", "欢喜", "愉快"),
    "love": ("深情", "爱意满满", "温柔", "心动", "痴情", "恋恋不舍"),
    "anger": ("生气", "愤怒", "恼火", "气愤", "暴躁", "不满"),
    "fear": ("害怕", "恐惧", "担心", "惊慌", "胆怯", "焦虑"),
    "surprise": ("惊讶", "吃惊", "诧异", "震惊", "意外", "目瞪口呆"),
}

# {t}: the writer's emotion today. {d}: the distractor. {a}, {b}: strength. {who}: another person.
ENGLISH_FRAMES = (
    "my {who} is {b}{d}, but i am {a}{t}",
    "i am {a}{t}, although my {who} is {b}{d}",
    "i am not {d} at all, i am {a}{t}",
    "i am {a}{t}, and not {b}{d}",
    "yesterday i was {b}{d}, today i am {a}{t}",
    "today i am {a}{t}, while yesterday i was {b}{d}",
    "everyone thinks that i am {b}{d}, in truth i am {a}{t}",
    "i am {a}{t}, even if my {who} believes that i am {b}{d}",
    "i am no longer {d}, only {a}{t}",
    "you call me {d}, and you are wrong: i feel {a}{t}",
)
CHINESE_FRAMES = (
    "我{who}{b}{d}，可是我{a}{t}",
    "我{a}{t}，虽然我{who}{b}{d}",
    "我一点也不{d}，我{a}{t}",
    "我{a}{t}，并不{d}",
    "昨天我{b}{d}，今天我{a}{t}",
    "今天我{a}{t}，而昨天我{b}{d}",
    "大家都以为我{b}{d}，其实我{a}{t}",
    "我{a}{t}，尽管我{who}觉得我{b}{d}",
    "我不再{d}了，只是{a}{t}",
    "你说我{d}，你错了，我{a}{t}",
)
ENGLISH_PARTS = {
    "who": ("sister", "brother", "mother", "teacher", "neighbour", "best friend"),
    "strength": ("", "very ", "so ", "a little ", "really ", "quite "),
    "when": ("", "after the exam ", "on the way home ", "since the phone call ", "at the station "),
}
CHINESE_PARTS = {
    "who": ("姐姐", "弟弟", "妈妈", "老师", "邻居", "朋友"),
    "strength": ("很", "非常", "有点", "真的", "特别", "十分"),
    "when": ("", "考试以后，", "回家的路上，", "接到电话以后，", "在车站，"),
}
