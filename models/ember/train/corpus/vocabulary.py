"""Everyday English beyond the nouns the tasks talk about, so that a user's own words are not all news to the model."""

COMMON = """
able about above accept account across act action actor add address advice afraid after again against age ago agree
air all allow almost alone along already also always among amount ancient and angle angry animal answer any apart
appear area argue arm army around arrive art artist ask asleep attack aunt autumn average avoid awake away baby back
bad balance ball band bank bar base basic bath battle beach beat beautiful beauty because become before begin behind
believe belong below beneath beside best better between beyond bill birth birthday bit bitter block blood blow board
body bone born boss both bottom bowl boy brain branch brick brief bring broad brother brown bug burn bus business but
button cabin call camp can cannot captain card care careful cause cell center century certain chance change chapter
character charge chase cheap check chest chicken chief child children choice choose circle citizen city class classic
classroom clear climb clock close cloth clothes club coast code collect college combine come comfort command common
company compare complete computer concert condition connect consider contain content context continue control cool
copy corner correct cost could count country couple courage course court cover create cross crowd cry culture current
curve custom customer cut daily damage danger data date daughter day dead deal dear death debate decide decision deck
default degree delay deliver demand deploy desert design desk detail developer device diamond dictionary did die
different difficult digital dinner direction dirty discover disk distance divide doctor document does dollar done
double doubt dozen dragon dress drop dust duty each ear early earn earth ease east easy edge education effect effort
eight either election electric eleven empty end enemy energy english enjoy enough enter equal error escape even
evening event ever every exact exam example except exercise exist expect expensive explain express extra eye face fact
factory fail fair fall false family famous far farmer fast father fault fear feed feel feet fellow few fiction field
fifteen fifty fight file fill film final fine finger finish first fit five fix flag floor flow fold follow food foot
football for force foreign forget form former forward four free fresh friday friend from front full fun function funny
future game gas gate general gift girl glad glass go goal god gold golf good government grade grain grammar grand
grandfather grandmother grass great ground group grow guess guest guide guitar gun guy had hair half hall hand hang
happen harbor has hate have he head health hear heart heat heavy height hello help her here hero herself high him
himself his history hit hold hole holiday home hope hospital host hot hotel hour how however human hundred hunt hurry
hurt husband idea if ill image imagine important improve in inch include increase indeed industry information inside
instead interest internet into invite iron is issue it item its itself january job join joke journey joy judge juice
jump june just keep kernel key kid kill kilo kind king kiss knee knight know knowledge kubernetes label lady lamb
language laptop large last late later laugh law layer lead leader leave left leg less lesson let letter level library
lie life lift light like limit line link lip list listen little live load local log lonely long look lose lot love low
luck lunch machine magazine magic mail main make man manager many march mark marriage master match material math
matter may maybe me meal mean measure meat medicine meet member memory mention message metal method metric middle
might mile military million mind minute miss mistake mix model modern moment monday money month more morning most
mother motion motor mouth move movie much museum music must my name narrow nation nature near nearly necessary neck
need neighbor neither nervous network never news next nice night nine no nobody node noise none noon nor normal north
nose not note nothing notice november now number nurse object ocean october of off offer official often oil on once
one only onto operator option or order ordinary other our out outside over own owner oxygen pack page pain pair paint
palace paragraph parent park part party pass past path pattern pay peace people pepper percent perfect perhaps period
person phrase physics piece pilot pipe place plain plan planet plant plastic play player please pocket pod poem poet
point police poor popular population position possible post pot potato pound power practice prefer prepare present
president press pretty price prince princess print prison private prize problem process produce program project
promise proper protect protein proud public purpose put python quality quantum quarter queen question quickly quite
race railway raise ratio reach ready real reason receive recipe record recover reduce region release remain remember
remove rent repair repeat replace replica reply report request rest restart restaurant result return review revision
reward rhythm ride right rise river road robot rock role roof room root rose rough route row royal rule safe sail
sailor same sample sandwich saturday sauce save scale scene schedule science scientist score scream search season seat
second secret secure seed seem select self sense sentence separate september series serious serve service set seven
several shade shadow shake shape share she shelf shell shift shine shoot should shoulder shout shut sick side sign
signal silence silk similar simple since single sister sit site six size skill skin sky slightly smart smell smile
smoke smooth snack so soap soccer social soft software soil soldier solid solve some somebody someone something
sometimes son soon sort soul sound source south space speak special speech speed spell spend spider spirit split sport
spot spread spring square stage stair stand standard state station stay steal steam steel step stick still stomach
story straight strange stream street strength stress strike string strong structure student study style subject such
sudden suggest suit summer sunday supper supply support suppose sure surface surprise sweet switch symbol system tail
talk tall tank task taste tax teacher team tear technology television tell ten tennis tense term test text than thank
that the their them then theory there therefore these they thick thin thing third thirteen thirty this those though
thought thousand thread three through throughout thunder thursday thus tie till time tip title to today together
toilet token tomorrow tone tongue tonight too tool tooth top total touch tour toward town toy track trade traffic
training translate travel treasure treat triangle trick trip trouble truck true trust truth try tube tuesday turn
twelve twenty twice twin two type uncle under understand union unique unit university until up upon upper us use
useful user usual valley value variable various vegetable very victory video view village visit voice volume vote wake
wall want war warning wash waste water wave way we weak wealth weapon wear weather web wedding week weekend weight
welcome well west what whatever wheat when where whether which while whisper who whole whose why wide wife win wine
wing winner winter wire wisdom wise wish with within without woman wonder wood wool word work worker world worry worth
would wound wrong yard yeah year yellow yes yesterday yet you young your yourself youth zero zone zoo
""".split()
NUMBER_WORDS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty
""".split()
