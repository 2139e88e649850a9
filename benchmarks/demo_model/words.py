"""Word lists of the generated texts."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words("""
    amber ancient azure bashful bitter blue bold brass brave bright brisk broken bronze calm careful cheerful clever
    cold copper coral crimson crooked crystal curious dancing dark deep distant dusty eager early eastern elder
    emerald empty faded fallen famous fearless fierce floating foggy forgotten fragrant frozen gentle giant gilded
    glass golden grand green grey happy hasty heavy hidden hollow honest humble hungry icy idle indigo iron ivory
    jade jolly kind lazy leaden little lively lonely loud lucky marble mellow merry mighty misty narrow nervous
    nimble noble northern oaken odd old olive orange pale patient peaceful pearl plain polite proud purple quick
    quiet rapid rare red restless rich round royal ruby rusty sapphire scarlet secret shining short shy silent
    silver simple sleepy slow small smoky snowy solemn southern speckled spotted square steady stone stormy strange
    striped strong sunny swift tall tame tender thin tiny tired twisted upper velvet violet wandering warm western
    whispering white wild wise wooden yellow young
""")

NOUNS = _words("""
    acorn anchor antelope anvil apple archer arrow badger baker balloon banner barrel basket beacon bear beaver bell
    bison blanket boat book bottle bridge broom bucket buffalo button camel candle canyon carriage castle cat cedar
    chair chest chimney clock cloud compass cottage crane cricket crow crown cup curtain daisy deer desk dolphin
    donkey door dragon drum duck eagle elephant elk falcon feather fence ferry fiddle finch fisher flag flute forest
    fountain fox frog garden gate giraffe goat goose grove guitar hammer harbour hare harp hawk hedgehog helmet
    heron hill horn horse island jackal jar kettle key kite ladder lake lamp lantern leopard library lighthouse lily
    lion lizard lobster lynx magpie maple market meadow mill mirror mole monkey moose mountain mouse needle
    nightingale notebook oak ocean orchard otter owl oyster panther parrot path peacock pebble pelican pencil
    penguin piano pigeon pilgrim pillow pine planet plough pony quail rabbit raven reindeer ribbon ring river robin
    rocket rooster rope rose sailor salmon saddle seal shark sheep shepherd shield shore sparrow spider spoon
    squirrel stag stork stove swallow swan table teapot temple thistle tiger tortoise tower trumpet tulip turtle
    umbrella valley violin wagon walnut walrus weaver well whale wheel willow window wolf wren zebra
""")

COLOURS = _words("""
    black blue brown gold green grey orange pink purple red silver turquoise violet white yellow
""")

PLACES = _words("""
    attic barn basement bakery boathouse cellar chapel courtyard dairy forge garage garden granary greenhouse hall
    harbour kitchen laundry library lighthouse loft market mill museum observatory office orchard pantry parlour
    school shed stable station storehouse theatre tower vault warehouse workshop
""")

NAMES = _words("""
    Ada Albert Alice Anna Arthur Beatrice Bruno Carl Cecilia Clara Daniel David Dora Edith Edward Elena Emil Emma
    Ernest Eva Felix Flora Frank Frida George Grace Greta Hannah Harold Helen Henry Hugo Ida Irene Isaac Ivan Jacob
    James Jane Johanna John Julia Karl Laura Leo Lucy Magnus Margaret Maria Martin Mary Max Mina Nora Olga Oscar
    Otto Paul Peter Robert Rosa Ruth Samuel Sara Simon Sofia Thomas Vera Victor Walter Wilma
""")

PEOPLE = _words("""
    baker blacksmith captain carpenter clerk cook doctor farmer ferryman fisherman gardener glazier grocer innkeeper
    librarian mason mayor miller musician nurse painter pilot postman potter printer sailor schoolmaster shepherd
    shoemaker tailor teacher watchmaker weaver widow
""")

THINGS = _words("""
    apples barrels baskets bells blankets books boots bottles boxes bread bricks brushes butter buttons candles
    carpets chairs charts cheese cloth coal coins cups dishes drawings eggs feathers flour flowers glasses grain
    hats herbs honey keys ladders lamps leather letters maps milk mirrors nails needles nets newspapers oats onions
    oranges paper pears pencils pictures plates plums potatoes ribbons ropes sacks salt seeds shells shoes soap
    spoons stamps stones sugar tea tiles tools umbrellas vegetables wheels wine wood wool
""")
